"""Formal cost models: DT-FM's communication cost, ATOM's swapping, the cost of churn."""
