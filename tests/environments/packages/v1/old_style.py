"""An environment in the style of verifiers before 0.4."""


def load_environment() -> None: ...
