"""A laboratory of real networks on one machine: lab.py."""
