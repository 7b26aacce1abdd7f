"""What compression does to gradients and to training; figures, tables and plots."""
