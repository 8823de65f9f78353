"""Start, watch, restart and stop the processes of a deployment on this machine."""
