"""Two raylets on this machine, each with one CPU. Prints the address; a line on its input takes the second one away."""

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
if sys.stdin.readline():
    cluster.remove_node(second, allow_graceful=False)
    print("gone", flush=True)
    sys.stdin.readline()
cluster.shutdown()
