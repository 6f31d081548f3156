"""What a create call says for a preset: pure text, table by table."""

from __future__ import annotations

import tomllib

import pytest

from gpu_turnstile.presets.schema import Preset, parse_preset
from gpu_turnstile.runtimes.docker_api import Frames
from gpu_turnstile.runtimes.docker_config import (
    config_hash,
    container_config,
    device_requests,
    labelled,
    same_devices,
    split_image,
)
from gpu_turnstile.runtimes.docker_errors import DockerError, start_text
from gpu_turnstile.runtimes.docker_host import DEFAULT_SOCKET, gate_id, socket_path

ALL = {"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}


def parse(text: str) -> Preset:
    return parse_preset("p", text, tomllib.loads(text), "p.toml")


def llama(model: str = 'path = "/models/a.gguf"', runtime: str = "") -> Preset:
    return parse(f"""
engine = "llama-server"
[model]
{model}
[runtime]
kind = "docker"
image = "llama.cpp:server-cuda"
{runtime}
""")


def bind(path: str, target: str = "", *, writable: bool = False) -> dict[str, object]:
    return {"Type": "bind", "Source": path, "Target": target or path, "ReadOnly": not writable}


def test_a_preset_becomes_a_whole_container():
    preset = llama(runtime='args = ["-fa", "on"]\nenv = { THREADS = "8" }\ncontext = 4096\nstop_grace_s = 2.5')
    assert container_config(preset, 5001) == {
        "Image": "llama.cpp:server-cuda",
        "Cmd": ["-m", "/models/a.gguf", "--host", "0.0.0.0", "--port", "8080", "-c", "4096", "-fa", "on"],
        "Env": ["THREADS=8"],
        "Labels": {"turnstile.preset": "p"},
        "ExposedPorts": {"8080/tcp": {}},
        "StopTimeout": 3,
        "HostConfig": {
            "Init": True,
            "RestartPolicy": {"Name": "no"},
            "AutoRemove": False,
            "PortBindings": {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "5001"}]},
            "Mounts": [bind("/models/a.gguf")],
            "DeviceRequests": [ALL],
            "ShmSize": 8 << 30,
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}},
        },
    }


def test_the_port_of_a_preset_is_the_one_inside():
    config = container_config(llama(runtime="port = 9000"), 5001)
    assert config["HostConfig"]["PortBindings"] == {"9000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "5001"}]}
    assert config["Cmd"][-1] == "9000"


def test_an_image_that_needs_no_command_gets_none():
    preset = parse('engine = "comfyui"\n[runtime]\nkind = "docker"\nimage = "comfy"\nport = 8188')
    assert "Cmd" not in container_config(preset, 5001)


def test_port_and_model_are_filled_in():
    preset = parse("""
engine = "vllm"
[model]
path = "/models/q"
[runtime]
kind = "docker"
image = "vllm"
args = ["--model", "{model}", "--port", "{port}"]
env = { URL = "http://0.0.0.0:{port}" }
""")
    config = container_config(preset, 5001)
    assert config["Cmd"] == ["--model", "/models/q", "--port", "8080", "--served-model-name", "p"]
    assert config["Env"] == ["URL=http://0.0.0.0:8080"]
    assert config["HostConfig"]["Mounts"] == [bind("/models/q")]


@pytest.mark.parametrize(
    ("model", "mounts", "expected"),
    [
        ('path = "/m/a.gguf"', "", [bind("/m/a.gguf")]),
        ('path = "models/a.gguf"', "", []),  # of the image
        ('path = "/m/a.gguf"\nmmproj = "/m/p.gguf"', "", [bind("/m/a.gguf"), bind("/m/p.gguf")]),
        ('path = "/m/a.gguf"\nchat_template = "/t/c.jinja"', "", [bind("/m/a.gguf"), bind("/t/c.jinja")]),
        ('path = "/m/a-00001-of-00003.gguf"', "", [bind("/m")]),
        ('path = "/m/a-00001-of-00003.gguf"\nmmproj = "/m/p.gguf"', "", [bind("/m")]),
        ('path = "/models/a.gguf"', 'mounts = ["/data/m:/models"]', [bind("/data/m", "/models")]),
        ('path = "/m/a.gguf"', 'mounts = ["/c:/cache:rw"]', [bind("/c", "/cache", writable=True), bind("/m/a.gguf")]),
        ('path = "/m/a.gguf"', 'mounts = ["/c:/c:ro"]', [bind("/c"), bind("/m/a.gguf")]),
        ('repo = "a/b"\nfile = "c.gguf"', "", []),
    ],
)
def test_the_model_is_mounted_where_it_is_unless_something_else_is_there(model, mounts, expected):
    assert container_config(llama(model, mounts), 1)["HostConfig"]["Mounts"] == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((), []),
        (("all",), [ALL]),
        (("0", "GPU-1a2b"), [{**ALL, "Count": 0, "DeviceIDs": ["0", "GPU-1a2b"]}]),
        (
            ("nvidia.com/gpu=0",),
            [{**ALL, "Driver": "cdi", "Count": 0, "DeviceIDs": ["nvidia.com/gpu=0"], "Capabilities": None}],
        ),
        (("amd.com/gpu=all", "0"), ["", "cdi"]),
    ],
)
def test_devices(devices, expected):
    requests = device_requests(devices)
    assert requests == expected or [request["Driver"] for request in requests] == expected


@pytest.mark.parametrize(
    ("keys", "expected"), [("", [ALL]), ("gpus = []", []), ('gpus = ["0"]', [{**ALL, "Count": 0, "DeviceIDs": ["0"]}])]
)
def test_only_a_list_left_out_is_all_cards(keys, expected):
    assert container_config(llama(runtime=keys), 1)["HostConfig"]["DeviceRequests"] == expected


@pytest.mark.parametrize(
    ("asked", "got", "same"),
    [
        ([], None, True),
        ([ALL], [{**ALL, "DeviceIDs": []}], True),
        ([ALL], None, False),
        ([ALL], [], False),
        ([ALL], [{**ALL, "Count": 1}], False),
        ([{**ALL, "DeviceIDs": ["0"]}], [{**ALL, "DeviceIDs": ["1"]}], False),
    ],
)
def test_devices_that_are_echoed_are_compared_by_what_they_mean(asked, got, same):
    assert same_devices(asked, got) is same


def test_the_hash_tells_configurations_apart_and_knows_them_again():
    first, again, other = (labelled(container_config(llama(), port), "gate") for port in (1, 1, 2))
    assert first == again
    assert first["Labels"]["turnstile.config"] != other["Labels"]["turnstile.config"]
    assert first["Labels"]["turnstile.gate"] == "gate"
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("a", ("a", "latest")),
        ("a:1", ("a", "1")),
        ("host:5000/a", ("host:5000/a", "latest")),
        ("host:5000/a/b:1", ("host:5000/a/b", "1")),
        ("a@sha256:0", ("a", "sha256:0")),
    ],
)
def test_an_image_is_split_into_repository_and_tag(image, expected):
    assert split_image(image) == expected


def test_the_socket_is_the_one_of_docker_host():
    assert socket_path({}) == DEFAULT_SOCKET
    assert str(socket_path({"DOCKER_HOST": "unix:///run/user/1000/docker.sock"})) == "/run/user/1000/docker.sock"
    for wrong in ("tcp://1.2.3.4:2375", "ssh://host", "/run/docker.sock", "unix://relative"):
        with pytest.raises(ValueError, match=wrong):
            socket_path({"DOCKER_HOST": wrong})


def test_a_gate_is_known_by_its_state_folder(tmp_path):
    assert gate_id(tmp_path) == gate_id(tmp_path / "x" / "..")
    assert gate_id(tmp_path) != gate_id(tmp_path / "x")


# Docker's messages as they are; what must be in the text for a person.
MESSAGES = [
    ('could not select device driver "" with capabilities: [[gpu]]', "install the NVIDIA Container Toolkit"),
    ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=7", "no CDI device nvidia.com/gpu=7"),
    (
        "error running hook #0: exit status 1, stderr: nvidia-container-cli: initialization error: nvml error: "
        "driver not loaded: unknown",
        "the GPU driver refused: initialization error: nvml error: driver not loaded",
    ),
    (
        "driver failed programming external connectivity on endpoint x: Bind for 127.0.0.1:18080 failed: port is "
        "already allocated",
        "the port 127.0.0.1:18080 is taken by another container",
    ),
    (
        "Error starting userland proxy: listen tcp4 127.0.0.1:80: bind: address already in use",
        "the port 127.0.0.1:80 is taken by another program",
    ),
    (
        "failed to bind host port for 127.0.0.1:43551:10.213.111.2:8080/tcp: address already in use",
        "the port 127.0.0.1:43551 is taken by another program",
    ),
    ("failed to bind host port 127.0.0.1:81/tcp: address already in use", "the port 127.0.0.1:81 is taken by another"),
    (
        'invalid mount config for type "bind": bind source path does not exist: /no',
        "there is no /no on the machine Docker runs on",
    ),
    (
        'OCI runtime create failed: exec: "foo": executable file not found in $PATH: unknown',
        "the image cannot run foo: executable file not found in $PATH",
    ),
    ("something new\nin two lines", "Docker refused: something new in two lines (500)"),
]


@pytest.mark.parametrize(("message", "expected"), MESSAGES)
def test_what_docker_says_becomes_one_line_for_a_person(message, expected):
    text = start_text(DockerError(500, message))
    assert expected in text
    assert "\n" not in text


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
def test_a_log_comes_out_of_its_frames_however_it_is_cut(size):
    framed = b"".join(bytes([1, 0, 0, 0]) + len(t).to_bytes(4, "big") + t for t in (b"one\n", b"", b"two " * 50))
    frames = Frames()
    pieces = [piece for at in range(0, len(framed), size) for piece in frames.feed(framed[at : at + size])]
    assert b"".join(pieces) == b"one\n" + b"two " * 50


def test_the_folder_for_slots_is_mounted_writable_at_one_place():
    preset = parse("""
engine = "llama-server"
[model]
path = "/models/q.gguf"
[runtime]
kind = "docker"
image = "l"
""")
    body = container_config(preset, 5001, "/state/contexts/p")
    assert body["HostConfig"]["Mounts"][-1] == {
        "Type": "bind",
        "Source": "/state/contexts/p",
        "Target": "/turnstile-contexts",
        "ReadOnly": False,
    }
    assert body["Cmd"][-2:] == ["--slot-save-path", "/turnstile-contexts"]
    assert "/turnstile-contexts" not in str(container_config(preset, 5001))
