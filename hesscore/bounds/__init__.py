"""Upper bounds on the spectral norm of a block's Hessian, for every pair of its parameters, from less and more data."""
