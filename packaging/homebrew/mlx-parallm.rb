class MlxParallm < Formula
  include Language::Python::Virtualenv

  desc "Model server with OpenAI's API for many clients, built on MLX"
  homepage "{{homepage}}"
  url "{{url}}"
  version "0.1.0"
  sha256 "{{sha256}}"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.12"

  # MLX is published as wheels alone, so the pinned wheels are installed as they are.
  PINS = %w[
    annotated-doc==0.0.7
    annotated-types==0.8.0
    anyio==4.16.0
    click==8.5.1
    editables==0.6
    fastapi-swagger==0.4.64
    fastapi==0.165.0
    filelock==4.2.11
    fsspec==2026.9.0
    h11==0.16.0
    hatchling==1.33.0
    hf-xet==1.8.0
    httpcore2==2.16.2
    httptools==0.9.0
    httpx2==2.16.2
    huggingface-hub==2.4.0
    idna==3.20
    jinja2==3.1.6
    llguidance==1.9.1
    markdown-it-py==4.3.0
    markupsafe==3.0.4
    mdurl==0.1.2
    mlx-lm==0.32.2
    mlx-metal==0.32.4
    mlx==0.32.4
    numpy==2.4.6
    opentelemetry-api==1.45.2
    packaging==26.3
    pathspec==1.1.1
    pillow==13.0.0
    pluggy==1.7.0
    prometheus-client==0.26.0
    protobuf==7.36.2
    pydantic-core==2.50.4
    pydantic==2.14.3
    pygments==2.21.0
    python-multipart==0.0.34
    pyyaml==6.0.3
    regex==2026.11.15
    rich==15.0.0
    safetensors==0.8.0
    sentencepiece==0.2.3
    shellingham==1.5.4
    starlette==1.10.0
    tokenizers==0.23.3
    tqdm==4.70.1
    transformers==5.23.0
    trove-classifiers==2026.9.21.13
    truststore==0.10.5
    typer==0.29.2
    typing-extensions==4.16.0
    typing-inspection==0.4.5
    uvicorn==0.54.0
    uvloop==0.23.0
    websockets==17.4
  ].freeze

  def install
    virtualenv_create(libexec, "python3.12", without_pip: false)
    pip = [libexec/"bin/python", "-m", "pip", "install", "--no-deps"]
    system(*pip, "--only-binary=:all:", *PINS)
    system(*pip, "--no-build-isolation", buildpath)
    bin.install_symlink libexec/"bin/mlx_parallm", libexec/"bin/mlx-parallm"
  end

  service do
    run [opt_bin/"mlx_parallm", "serve"]
    keep_alive successful_exit: false
    environment_variables MLX_PARALLM_DATA_DIR: var/"mlx-parallm"
    log_path var/"log/mlx-parallm.log"
    error_log_path var/"log/mlx-parallm.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlx_parallm --version")
  end
end
