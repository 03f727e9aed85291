"""Rollouts and scores for reinforcement learning, between their routes and the engine."""
