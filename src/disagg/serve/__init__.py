"""The composition root of `disagg serve`: launcher and router over one topology.

::

    deployment = describe(topology, adapter, model)     # pure, apart from the number of CPU cores
    print(render_table(deployment))                     # what --dry-run shows
    exit_code = run(topology, adapter, model, ui)       # starts it, and serves until it is told to stop
"""

from disagg.serve.deployment import Deployment, describe, plan
from disagg.serve.dry_run import render_json, render_table
from disagg.serve.session import Ui, run

__all__ = ["Deployment", "Ui", "describe", "plan", "render_json", "render_table", "run"]
