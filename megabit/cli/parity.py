def parity() -> None:
    """x"""
