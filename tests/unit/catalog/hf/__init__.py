"""Tests of reading configurations."""
