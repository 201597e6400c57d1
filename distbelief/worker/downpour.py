"""Downpour SGD as a plug-in of the job system: its [algorithm] table and roles.

Dean et al. 2012, section 4.1: every model replica trains on its own part of the data, and
fetches from and pushes to the shards of a parameter server without waiting for the others.
The steps are in `training`, when they fetch and push in `exchange`.
"""

from typing import Final, final

import msgspec

from distbelief.config.algorithms import Facts
from distbelief.config.job import ClusterTable, Elastic
from distbelief.core.errors import JobError
from distbelief.core.torch_optimizers import OF_WHOLE_TENSORS
from distbelief.parameter_server.codecs import Threshold, TopK
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.protocol.role import Role
from distbelief.task.task import BuildContext
from distbelief.worker import build as roles
from distbelief.worker.downpour_settings import DownpourSettings


@final
class DownpourAlgorithm:
    coordinator: Final = None
    config: Final = DownpourSettings  # struct of the [algorithm] table, without its `name`
    # Metrics that it reports besides samples, loss and metric.
    fields: Final = (
        "staleness_mean",
        "staleness_p95",
        "staleness_max",
        "pushes_lost",
        "steps_per_push",
    )

    def facts(self, config: DownpourSettings) -> Facts:
        lockfree, n_small, exchanges = config.lockfree, 1, 0.0
        if config.exchange.n_epochs is None:  # else seldom, and it depends on the data
            pace = config.pace
            exchanges = 1.0 / (pace.n_push if pace.means else pace.n_fetch) + 1.0 / pace.n_push
        if lockfree is not None:
            n_small = len(lockfree.sizes(config.batch_size, batch_size=config.batch_size))
        return Facts(
            loss=config.loss,
            batch_size=config.batch_size,
            exchanges=exchanges,
            in_ring=config.exchange.route == "ring",
            seed=config.seed,
            rule=config.rule,
            inner=config.inner,
            threads=None if lockfree is None else lockfree.threads,
            n_small_batches=n_small,
            takes_sparse=lockfree is not None and config.clip_norm is None,
            policy=config.exchange,
            epochs=config.epochs if config.order == "dealt" else None,
            epoch_share=config.epoch_share,
            warm_start_left=config.warm_start_left,
            warm_start_samples=config.warm_start_steps * config.batch_size,
        )

    def settled(self, config: DownpourSettings, cluster: ClusterTable) -> DownpourSettings:
        """Return the config with an order: samples are dealt where they can.

        JobError if the exchange does not fit the number of replicas, or their ranks.
        """
        if config.order is None:
            is_even = len(cluster.partitions_wanted) == 1
            # Ranks of which one is a push ahead would wait for each other.
            waits = cluster.is_split and config.exchange.staleness is not None
            in_ring = config.exchange.route == "ring"
            order = "dealt" if is_even and not (waits or in_ring) else "parts"
            config = msgspec.structs.replace(config, order=order)
        self._check(config, cluster)
        return config

    def _check(self, config: DownpourSettings, cluster: ClusterTable) -> None:
        inner = config.inner
        try:
            config.exchange.refuse(config.rule, inner=inner is not None, workers=cluster.n_replicas)
        except ValueError as error:
            raise JobError(f"[algorithm] {error}") from None
        if config.exchange.route == "ring":
            self._check_ring(config, cluster)
        if config.exchange.sends_factors:
            self._check_factors(config, cluster)
        self._check_share(config, cluster)
        if isinstance(cluster.replicas, Elastic) and config.order != "dealt":
            raise JobError(
                f'[cluster] replicas has min and max, and [algorithm] order is "{config.order}", '
                'where parts of those that are not there are not read: use order = "dealt"'
            )
        if isinstance(cluster.replicas, Elastic) and cluster.is_split:
            raise JobError(
                "[cluster] replicas has min and max, and partitions or plan splits each "
                "into ranks: give replicas a number, or split nothing"
            )
        if config.order == "dealt" and cluster.is_split and config.exchange.staleness is not None:
            raise JobError(
                '[algorithm] order is "dealt", exchange.staleness '
                f"{config.exchange.staleness}, and [cluster] splits replicas: ranks would wait for "
                'each other after one has died: use order = "parts", or split nothing'
            )
        if config.order == "dealt" and len(cluster.partitions_wanted) > 1:
            raise JobError(
                f'[algorithm] order is "dealt", and [cluster] partitions {cluster.partitions_text} '
                "splits replicas differently, so that shards do not know which samples each part "
                'of the parameters has: use order = "parts", or equal partitions'
            )
        if config.lockfree is not None and (cluster.is_split or cluster.is_on_device):
            raise JobError(
                "[algorithm] lockfree is given, and [cluster] partitions, plan or device is, too: "
                "threads share the parameters of a whole model on the CPU: leave one out"
            )
        if cluster.is_split:
            self._check_codecs(config.exchange)
        if config.accumulate > 1 and config.clip_norm is not None and cluster.is_split:
            raise JobError(
                f"[algorithm] accumulate is {config.accumulate}, there is clip_norm, and [cluster] "
                "partitions, plan or device splits replicas, whose ranks know the norm of single "
                "gradients only: leave one out (rule.clip_value bounds the mean)"
            )
        if inner is not None and inner["name"] in OF_WHOLE_TENSORS and cluster.is_split:
            raise JobError(
                f"[algorithm] inner.name is {inner['name']!r}, whose steps depend on whole "
                "tensors, and [cluster] partitions or plan splits them: use another optimizer"
            )

    def _check_share(self, config: DownpourSettings, cluster: ClusterTable) -> None:
        """Refuse `every` in epochs where a replica has no share, or an exchange ends sooner."""
        every, n_epochs = config.exchange.every, config.exchange.n_epochs
        if n_epochs is None:
            return
        if isinstance(cluster.replicas, Elastic):
            raise JobError(
                f'[algorithm.exchange] every is "{every}", of the share of a replica, and '
                "[cluster] replicas has min and max, so that shares change: give replicas a "
                "number, or let every count steps"
            )
        if n_epochs > 1 and config.order == "dealt":
            raise JobError(
                f'[algorithm.exchange] every is "{every}", and samples are dealt, so that an '
                'exchange ends with its epoch: use order = "parts", or at most "1 epoch"'
            )

    def _check_codecs(self, exchange: ExchangePolicy) -> None:
        """Refuse what is not for split replicas."""
        codec = exchange.push_codec
        if isinstance(codec, TopK | Threshold):
            raise JobError(
                f"[algorithm.exchange] push.codec is {codec.form!r}, which chooses among all "
                'elements of a push, and [cluster] partitions or plan splits them: use "int4", '
                '"int8" or "bfloat16"'
            )
        if exchange.durable:
            raise JobError(
                "[algorithm.exchange] durable is true, and [cluster] partitions or plan "
                "splits replicas, whose ranks save nothing: leave durable out"
            )
        fetched = exchange.fetched
        if not isinstance(fetched, str):
            raise JobError(
                f"[algorithm.exchange] fetch.codec is {fetched.form!r}, words of whole shards, and "
                '[cluster] partitions or plan splits replicas, which fetch parts: use "bfloat16"'
            )

    def _check_ring(self, config: DownpourSettings, cluster: ClusterTable) -> None:
        unfit = {
            "[cluster] splits replicas into ranks": cluster.is_split
            and "leave partitions and plan out",
            "[cluster] replicas has min and max": isinstance(cluster.replicas, Elastic)
            and "give replicas a number",
            '[algorithm] order is "dealt"': config.order == "dealt" and 'use order = "parts"',
            "[algorithm] has warm_start_steps": config.warm_start_steps > 0
            and "leave warm_start_steps out",
            "[algorithm] rule has ema": config.rule.ema is not None and "leave ema out",
            "[algorithm] has max_steps": config.max_steps is not None and "let [stop] end the job",
            "[algorithm] has n_fetch or n_push": (config.n_fetch, config.n_push) != (1, 1)
            and "leave them out",
        }
        for what, fix in unfit.items():
            if fix:
                raise JobError(
                    f'[algorithm.exchange] route is "ring" and {what}, which a ring does not '
                    f'know: {fix}, or use route = "server"'
                )

    def _check_factors(self, config: DownpourSettings, cluster: ClusterTable) -> None:
        unfit = {
            "[algorithm] has clip_norm, which changes gradients": config.clip_norm is not None
            and "leave clip_norm out, or clip by value at the shards (rule.clip_value)",
            "[cluster] splits replicas into ranks, which compute without layers": cluster.is_split
            and "leave partitions and plan out",
            "[cluster] has device, where inputs of layers are not kept": cluster.is_on_device
            and "leave device out",
            '[cluster] has rounding = "any", so that shards may round otherwise': cluster.rounding
            == "any"
            and 'use rounding = "same"',
        }
        for what, fix in unfit.items():
            if fix:
                raise JobError(
                    f'[algorithm.exchange] push.codec is "factors" or "auto", and {what}: {fix}, '
                    'or use push = { codec = "int4" }'
                )

    def build(self, name: str, *, config: DownpourSettings, context: BuildContext) -> Role:
        """Return the role of this name, in its own process; may take long, starts nothing.

        JobError if the model or the data cannot be built; LocalProtocolError if the job has no
        such role.
        """
        if config.counts_in_data:
            n_train = context.n_train or len(context.train_data())
            config = config.in_pushes(n_train, n_replicas=context.n_replicas, pieces=context.pieces)
        return roles.build_role(
            name,
            context=context,
            shard=lambda: roles.build_shard(
                name,
                rule=config.rule,
                policy=roles.policy_of_shards(config.exchange),
                context=context,
                deals=config.order == "dealt",
            ),
            replica=lambda index: roles.build_replica(index, config=config, context=context),
            rank=lambda split: roles.build_rank(name, config=config, context=context, split=split),
        )


DOWNPOUR: Final = DownpourAlgorithm()
