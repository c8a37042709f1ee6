"""What is predicted, against which controls, on which split."""
