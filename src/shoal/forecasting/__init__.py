"""Forecasts of long runs, without sending their messages: what `shoal forecast` prints. Every figure in here is simulated."""
