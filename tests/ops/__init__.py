"""Tests of the ops; `cases.py` holds the checks that every backend must pass."""
