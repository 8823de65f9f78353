"""SGLang: how its prefill and decode servers are handed a request. They are started by someone else."""
