"""Training of the embedded models, and of models that think."""
