"""Ray: nodes, the processes on them, and rewards spread over them (cluster.type = "ray")."""
