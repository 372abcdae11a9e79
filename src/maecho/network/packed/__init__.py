"""Modules that keep several matrices in one parameter, or compute a weight: a twin has each as a plain layer."""
