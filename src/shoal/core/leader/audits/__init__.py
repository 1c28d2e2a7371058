"""Audited steps: before some commits other replicas compute again what a step's replicas have computed."""
