"""Consensus: one replicated value, the View, agreed by signed quorums; and the operator's override of it."""
