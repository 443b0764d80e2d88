"""The kubelet's pod-resources API: which container was assigned which GPU.

Source: k8s.io/kubelet/pkg/apis/podresources/v1/api.proto, stable since Kubernetes 1.28. Needs the
extra `kubernetes`, and permission to connect, which by default only root has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from torchmem.exporter.pod_names import AssignedContainer, PodContainer
from torchmem.sample.untrusted import sanitize_text

_log = logging.getLogger(__name__)

KUBELET_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
DEADLINE_SECONDS = 1.0
MAX_ANSWER_BYTES = 16 << 20  # the kubelet's own limit, podresources/server_v1.go
_LIST = "/v1.PodResourcesLister/List"
_GPU_RESOURCES = "nvidia.com/"
_GPU_DRIVER = "gpu.nvidia.com"

_TEXT = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_ONE = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
_MANY = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
# The fields of each message with their numbers, as far as they are needed.
_MESSAGES = {
    "ListPodResourcesResponse": [(1, "pod_resources", _MANY, "PodResources")],
    "PodResources": [
        (1, "name", _ONE, ""),
        (2, "namespace", _ONE, ""),
        (3, "containers", _MANY, "Container"),
    ],
    "Container": [
        (1, "name", _ONE, ""),
        (2, "devices", _MANY, "Devices"),
        (5, "dynamic_resources", _MANY, "DynamicResource"),
    ],
    "Devices": [(1, "resource_name", _ONE, ""), (2, "device_ids", _MANY, "")],
    "DynamicResource": [(4, "claim_resources", _MANY, "ClaimResource")],
    "ClaimResource": [(2, "driver_name", _ONE, ""), (4, "device_name", _ONE, "")],
}


class PodResources:
    """Asks the kubelet at each call; a change of what goes wrong is logged once."""

    def __init__(
        self, socket: Path = KUBELET_SOCKET, deadline_seconds: float = DEADLINE_SECONDS
    ) -> None:
        self._socket = socket
        self._deadline_seconds = deadline_seconds
        self._problem = ""

    def __call__(self) -> Sequence[AssignedContainer]:
        """Return the containers with GPUs; empty if the kubelet does not respond in time."""
        try:
            answer = _ask(self._socket, self._deadline_seconds)
        except grpc.RpcError as error:
            self._note(f"{error.code().name}: {error.details()}")
            return []
        self._note("")
        return list(_containers(answer))

    def _note(self, problem: str) -> None:
        if problem and problem != self._problem:
            _log.warning(
                "the kubelet's socket %s gives no names of pods: %s", self._socket, problem
            )
        self._problem = problem


def _ask(socket: Path, deadline_seconds: float) -> Any:
    """Call List; raise grpc.RpcError."""
    options = [("grpc.max_receive_message_length", MAX_ANSWER_BYTES)]
    with grpc.insecure_channel(f"unix:{socket}", options) as channel:
        call: Callable[..., Any] = channel.unary_unary(
            _LIST, response_deserializer=_answer_class().FromString
        )
        return call(b"", timeout=deadline_seconds)


def _containers(answer: Any) -> Iterator[AssignedContainer]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            devices = frozenset(
                device
                for group in container.devices
                if group.resource_name.startswith(_GPU_RESOURCES)
                for device in group.device_ids
            )
            claimed = frozenset(
                claim.device_name
                for resource in container.dynamic_resources
                for claim in resource.claim_resources
                if claim.driver_name == _GPU_DRIVER
            )
            if devices or claimed:
                names = map(sanitize_text, (pod.name, pod.namespace, container.name))
                yield AssignedContainer(PodContainer(*names), devices, claimed)


@cache
def _answer_class() -> Any:
    """Build the classes of the messages at run time: generated code needs one protobuf version."""
    file = descriptor_pb2.FileDescriptorProto(
        name="torchmem/podresources.proto", package="v1", syntax="proto3"
    )
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for number, name, label, of in fields:
            described.field.add(
                name=name,
                number=number,
                label=label,
                type=_MESSAGE if of else _TEXT,
                type_name=f".v1.{of}" if of else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("v1.ListPodResourcesResponse")
    )
