"""`python -m retrain`, also the child processes of campaigns and launchers."""

from retrain.cli import main
from retrain.runtime.child import end_with_parent

end_with_parent()
main()
