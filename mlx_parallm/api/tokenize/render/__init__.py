"""Requests as the engine gets them, and conversations as templates render them."""
