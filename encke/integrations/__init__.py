"""Integrations with training libraries. Each module imports its library only when it is used."""

__all__: list[str] = []
