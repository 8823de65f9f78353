"""vLLM on Qualcomm Cloud AI: what its launcher would start, and the content-keyed handoff. Tested by dry run only."""
