"""The leader's rules: pure functions of the agreed view, the facts, the settings and the time. order.py lists them."""
