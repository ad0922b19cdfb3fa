"""Everything that knows Ray, time and machines: the Serve application, its deployments, the membership and the command
line.
"""
