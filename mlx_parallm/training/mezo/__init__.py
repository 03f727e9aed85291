"""MeZO: steps from losses at perturbed parameters, a log of them, and its replay."""
