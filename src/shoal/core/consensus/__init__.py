"""Consensus: one replicated value, the View, agreed by signed majorities; and the operator's override of it."""
