"""Studies of how compression changes gradients and training: figures, tables and plots."""
