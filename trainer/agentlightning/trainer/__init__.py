"""The trainer: transitions become gradients, gradients become published weights."""
