"""The data plane: one endpoint in front of the pools. `app.Router` is what others build."""
