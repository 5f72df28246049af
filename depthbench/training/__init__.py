"""Training: an experiment is resolved into a plan, trained by Lightning, and recorded into a run folder."""
