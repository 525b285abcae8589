"""The contract that all components share: names, identifiers, schemas and the transition service.

Components never import each other; they meet here and on the wire. The modules that the SDK needs
(`attributes`, `ids`, `packed`, `errors`, `process`) use the standard library alone. `schemas` and
`dataset` need pyarrow, `transitions_pb2*` need grpcio and protobuf: import them where they are used.
"""
