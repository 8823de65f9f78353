"""Disaggregated LLM serving: size it, run it, check it, over one topology."""

__version__ = "0.1.0"
