"""Images in prompts: their pixels as a model's processor prepares them, and the tokens they take.

``families`` says how each family of models writes an image, ``processor`` prepares pixels, and
``prompt`` puts both into a conversation. ``media`` reads the images before, and the worker's
tower runs on what is prepared here.
"""
