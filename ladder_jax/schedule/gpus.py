"""Descriptions of NVIDIA GPUs (XLA's GpuTargetConfig as text), for compiling on machines without one."""

import dataclasses

from ladder_jax.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Gpu:
    """compute: major version of the compute capability; clock: GHz; cache: bytes. HARDWARE has memory and bandwidth."""

    name: str
    compute: int
    cores: int
    clock: float
    cache: int

    def as_text(self, hardware: Hardware) -> str:
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {self.compute} minor: 0 }}
              core_count: {self.cores}
              clock_rate_ghz: {self.clock}
              memory_bandwidth: {int(hardware.bandwidth)}
              device_memory_size: {hardware.memory}
              l2_cache_size: {self.cache}
              fpus_per_core: 128
              threads_per_block_limit: 1024
              threads_per_warp: 32
              threads_per_core_limit: 2048
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: 232448
              shared_memory_per_core: 233472
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 }}
            device_description_str: "{self.name}"
        """


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 50 * 2**20),
    "b200": Gpu("NVIDIA B200", 10, 148, 1.965, 126 * 2**20),
}
