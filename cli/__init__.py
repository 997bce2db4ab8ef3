"""The command ``hess``: thin commands over hesscore."""
