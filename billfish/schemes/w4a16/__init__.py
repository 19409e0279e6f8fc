from billfish.schemes.w4a16.scheme import W4A16

__all__ = ["W4A16"]
