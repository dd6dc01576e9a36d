"""``KVFerryConnector``: vLLM's KV connector interface, handed on to the two sides of the adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvferry.engines.vllm.describe import describe_model, describe_pool, largest_window
from kvferry.engines.vllm.first_token import first_token_of
from kvferry.engines.vllm.identity import model_digest, requirements
from kvferry.engines.vllm.options import read_options
from kvferry.engines.vllm.pool_layout import LAYOUT_NAME, layer_number
from kvferry.engines.vllm.results import Results
from kvferry.engines.vllm.scheduler import SchedulerSide
from kvferry.engines.vllm.stats import FerryMetrics, FerryStats
from kvferry.engines.vllm.step import Step, Tickets
from kvferry.engines.vllm.tickets import TicketClient, TicketServer
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.errors import LocalError

__all__ = ["KVFerryConnector"]

# Under vLLM's own name, so that its logging configuration applies.
_logger = init_logger("vllm.kvferry")


@dataclass
class _StepMetadata(KVConnectorMetadata):
    step: Step = field(default_factory=Step)


@dataclass
class _WorkerAddress(KVConnectorHandshakeMetadata):
    """Where a rank serves tickets to its scheduler, and a digest of the model that it runs."""

    tickets: str
    model: str


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands a prompt's KV from one vLLM to another through kvferry; see docs/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        self._worker: WorkerSide | None = None
        self._server: TicketServer | None = None
        self._model = ""
        self._results = Results()
        self._clients: list[TicketClient] = []
        ranks = vllm_config.parallel_config.world_size
        self._scheduler = SchedulerSide(
            self._fetch_tickets,
            _logger.warning,
            ranks=ranks,
            window=largest_window(kv_cache_config),
            prefill_urls=self._options.prefill_urls,
            first_token=first_token_of(vllm_config, self._options),
        )

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the endpoint over vLLM's KV memory. Raises what kvferry cannot describe, by name."""
        config = self._vllm_config
        pool = describe_pool(kv_caches, self._kv_cache_config, config, config.parallel_config.rank)
        identity = describe_model(config)
        self._model = model_digest(identity)
        needs = requirements(identity, pool.layout, config.model_config.get_total_num_kv_heads(), LAYOUT_NAME)
        parallel = config.parallel_config
        self._worker = WorkerSide(
            pool,
            needs,
            self._options,
            rank=parallel.rank,
            replica_rank=getattr(parallel, "data_parallel_index", 0) * parallel.world_size,
            name=f"vllm {self._kv_transfer_config.engine_id} rank {parallel.rank}",
            log=_logger.warning,
        )
        self._server = TicketServer(self._worker.ticket)
        _logger.info("kvferry listens at %s", ", ".join(self._worker.endpoint.addresses))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler side has to know of this rank; vLLM gives it to that at start."""
        return None if self._server is None else _WorkerAddress(self._server.address, self._model)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step begins: claim the reservations that its prompts are pushed into."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_pushes(self._bound_step())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """End the offers whose blocks this step overwrites."""
        assert isinstance(kv_connector_metadata, _StepMetadata)
        self._work().before_step(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads; they never hold up a forward."""
        del forward_context, kwargs
        self._work().begin_loads(self._bound_step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only when all of its KV is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """The forward has written this layer: a push of it begins now; a pull reads after the forward."""
        del kv_layer, attn_metadata, kwargs
        self._work().layer_done(layer_number(layer_name))

    def wait_for_save(self) -> None:
        """The forward is done: offer the prompts that it finished."""
        self._work().begin_saves(self._bound_step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What ended since the last step; failures by request, which is right for hybrid models too."""
        self._results = self._work().collect(finished_req_ids)
        return KVConnectorTransferResults(self._results.saved, self._results.loaded, self._results.failed)

    def get_kv_connector_stats(self) -> FerryStats | None:
        """Observations of the results that were just reported."""
        stats = FerryStats.of(self._results)
        self._results = Results()
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Abort what is under way, release everything."""
        if self._server is not None:
            self._server.close()
        if self._worker is not None:
            self._worker.close()
        for client in self._clients:
            client.close()

    def _work(self) -> WorkerSide:
        if self._worker is None:
            raise LocalError("the KV caches were not registered")
        return self._worker

    def _bound_step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _StepMetadata)
        return metadata.step

    # Scheduler side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Where the workers serve their tickets, in the order of their ranks."""
        for _, address in sorted(metadata.items()):
            assert isinstance(address, _WorkerAddress)
            self._clients.append(TicketClient(address.tickets))
            self._scheduler.model = address.model  # all ranks have loaded the same one

    def on_new_request(self, request: Any) -> None:
        """Note what a request's ``kv_transfer_params`` ask for."""
        self._scheduler.added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much of a prompt prefill offers beyond the local prefix; always loaded asynchronously."""
        tokens = self._scheduler.loadable_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A load restores every group of the request."""
        del request
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks exist: load into them with the next step."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's message to the worker side."""
        return _StepMetadata(self._scheduler.end_step(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks stay for decode, and the ticket for the response."""
        del block_ids
        return self._scheduler.finished(request)

    def _fetch_tickets(self, request_id: str) -> Tickets:
        return tuple(
            client.fetch(request_id, self._options.ticket_timeout_seconds) for client in self._clients
        )

    # Both.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A push begins inside the forward, where a replayed graph would not call it."""
        del extra_config
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """vLLM's stats object out of its plain form."""
        return FerryStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FerryMetrics:
        """The metrics of /metrics."""
        return FerryMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
