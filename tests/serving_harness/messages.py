"""Messages of TensorFlow Serving's settings that its Python package leaves out.

Fields of BatchingParameters (servables/tensorflow/session_bundle_config.proto) and MonitoringConfig
(config/monitoring_config.proto) in tensorflow/serving.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

_LONG = ".google.protobuf.Int64Value"
_MESSAGES = {
    "BatchingParameters": {
        "max_batch_size": (1, _LONG),
        "batch_timeout_micros": (2, _LONG),
        "max_enqueued_batches": (3, _LONG),
        "num_batch_threads": (4, _LONG),
        "thread_pool_name": (5, ".google.protobuf.StringValue"),
        "allowed_batch_sizes": (6, "repeated int64"),
        "pad_variable_length_inputs": (7, "bool"),
        "enable_large_batch_splitting": (8, ".google.protobuf.BoolValue"),
        "max_execution_batch_size": (9, _LONG),
    },
    "PrometheusConfig": {"enable": (1, "bool"), "path": (2, "string")},
    "MonitoringConfig": {"prometheus_config": (1, ".tensorflow.serving.PrometheusConfig")},
}


def message(name: str) -> Any:
    """An empty message of that name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="settings.proto", package="tensorflow.serving", syntax="proto3"
    )
    file.dependency.append(wrappers_pb2.DESCRIPTOR.name)
    for each, fields in _MESSAGES.items():
        described = file.message_type.add(name=each)
        for field, (number, kind) in fields.items():
            repeated, _, kind = kind.rpartition(" ")
            added = described.field.add(name=field, number=number)
            added.label = added.LABEL_REPEATED if repeated else added.LABEL_OPTIONAL
            if kind.startswith("."):
                added.type, added.type_name = added.TYPE_MESSAGE, kind
            else:
                added.type = getattr(added, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"tensorflow.serving.{name}")
    )()
