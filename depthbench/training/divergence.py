class Diverged(Exception):
    pass
