# On the GPU machine, in the repository's root: vLLM and what it needs, from the pieces that
# prepare.sh made. Sets PYTHONPATH; a second call finds the work done.
#     . tools/vllm_gpu/setup.sh PIECES
site=${TMPDIR:-/tmp}/vllm_site
if [ ! -f "$site/.done" ]; then
    mkdir -p "$site"
    python3 - "$1" "$site" <<'P'
import concurrent.futures, lzma, pathlib, shutil, sys, tarfile
pieces, site = map(pathlib.Path, sys.argv[1:])
def library(name, to):
    (site / to).parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(pieces / f"{name}.xz") as a, open(site / to, "wb") as b:
        shutil.copyfileobj(a, b, 1 << 20)
def python():
    with tarfile.open(pieces / "site.tar.xz") as a:
        a.extractall(site, filter="fully_trusted")
with concurrent.futures.ProcessPoolExecutor() as pool:
    jobs = [
        pool.submit(python),
        pool.submit(library, "_C_stable_libtorch", "vllm/_C_stable_libtorch.abi3.so"),
        pool.submit(library, "_vllm_fa3_C", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"),
    ]
    for job in jobs:
        job.result()
# this checkout's entry point, as an installation of it would have it
info = site / "torch_paged_attn-0.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-paged-attn\nVersion: 0\n")
(info / "entry_points.txt").write_text(
    "[vllm.general_plugins]\ntorch_paged_attn = torch_paged_attn.integrations.vllm:register\n"
)
P
    touch "$site/.done"
fi
export PYTHONPATH="$site:$PWD" TRITON_CACHE_DIR=${TMPDIR:-/tmp}/vllm_triton
export VLLM_CACHE_ROOT=${TMPDIR:-/tmp}/vllm_cache VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export VLLM_HOST_IP=127.0.0.1
