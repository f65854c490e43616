"""Trains tiers and exits into one set of weights."""
