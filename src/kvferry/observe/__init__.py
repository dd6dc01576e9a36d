"""For those who look on: metrics, spans, logs and traces of transfers, as observers of an ``Endpoint``.

Each is made once and given to ``Endpoint.open(observers=[...])``. None of them is imported unless asked for.
"""
