//! One guest for the sandbox's tests: the first word of its parameters says what it does.
//!
//! It must never check what the tests check; it does as it is told and tells what it saw.

mod probe;
mod training;

wit_bindgen::generate!({ path: "../../../../wit", world: "training-job" });

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::hint::black_box;
use std::net::ToSocketAddrs;
use std::time::{Duration, Instant, SystemTime};

use nodus::gpu::{data, job, trunk};

struct Component;
export!(Component);

impl Guest for Component {
    fn run() -> Result<(), String> {
        let params = job::params();
        // The host's own command line passes on nothing but objects: {"do":"..."}.
        let params = params.strip_prefix("{\"do\":\"").and_then(|rest| rest.strip_suffix("\"}")).unwrap_or(&params);
        let (name, argument) = params.split_once(' ').unwrap_or((params, ""));
        match name {
            "ok" => Ok(()),
            "fail" => Err(argument.to_owned()),
            "panic" => panic!("{argument}"),
            "exit" => std::process::exit(argument.parse().unwrap()),
            "spin" => loop {
                black_box(());
            },
            "recurse" => Err(format!("{}", recurse(black_box(1)))),
            "alloc" => alloc(),
            "try-alloc" => try_alloc(),
            "print" => print(argument.parse().unwrap()),
            "log-bytes" => {
                job::log(job::Level::Info, &"x".repeat(argument.parse().unwrap()));
                Ok(())
            }
            "result-bytes" => Err("y".repeat(argument.parse().unwrap())),
            "metrics" => metrics(argument.parse().unwrap()),
            "limits" => {
                for limit in job::limits() {
                    job::metric(&limit.name, 0, limit.value as f64);
                }
                Ok(())
            }
            "clock-and-random" => clock_and_random(),
            "wait-on-clock" => wait_on_clock(),
            "reach" => reach(),
            "until-stop" => {
                while !job::should_stop() {}
                Err("stopped early".into())
            }
            "leak-batches" => leak_batches(),
            "text" => text(argument.parse().unwrap()),
            "probe" => probe::run(argument),
            "calls" => calls(argument.parse().unwrap()),
            _ => training::run(name, argument),
        }
    }
}

#[expect(unconditional_recursion, reason = "that is the test")]
fn recurse(depth: u64) -> u64 {
    let frame = black_box([depth; 64]);
    recurse(depth + 1) + frame[(depth % 64) as usize]
}

fn alloc() -> Result<(), String> {
    let mut held = Vec::new();
    loop {
        held.push(black_box(vec![1u8; 1 << 20]));
    }
}

fn try_alloc() -> Result<(), String> {
    let mut held: Vec<Vec<u8>> = Vec::new();
    loop {
        let mut block = Vec::new();
        if block.try_reserve_exact(1 << 20).is_err() {
            job::metric("held", 0, held.len() as f64);
            return Ok(());
        }
        held.push(black_box(block));
    }
}

fn print(lines: u64) -> Result<(), String> {
    for i in 0..lines {
        println!("line {i}");
    }
    eprintln!("to the error stream");
    job::metric("printed", 0, lines as f64);
    Ok(())
}

fn metrics(count: u64) -> Result<(), String> {
    for i in 0..count {
        job::metric(&"m".repeat(500), i, f64::NAN);
        job::progress(i, count);
    }
    Ok(())
}

fn clock_and_random() -> Result<(), String> {
    let start = Instant::now();
    let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    job::metric("seed", 0, job::seed() as f64);
    job::log(job::Level::Info, &format!("wall {wall:?} hash {}", RandomState::new().hash_one(1)));
    std::thread::sleep(Duration::from_secs(3600));
    job::log(job::Level::Debug, &format!("slept {:?}", start.elapsed()));
    Ok(())
}

fn wait_on_clock() -> Result<(), String> {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {}
    Ok(())
}

fn reach() -> Result<(), String> {
    let seen = [
        ("read", std::fs::read("/etc/passwd").is_err()),
        ("write", std::fs::write("out", b"x").is_err()),
        ("list", std::fs::read_dir("/").is_err()),
        ("connect", std::net::TcpStream::connect(("127.0.0.1", 80)).is_err()),
        ("listen", std::net::TcpListener::bind(("127.0.0.1", 0)).is_err()),
        ("datagram", std::net::UdpSocket::bind(("127.0.0.1", 0)).is_err()),
        ("resolve", ("localhost", 80).to_socket_addrs().is_err()),
        ("environment", std::env::vars().next().is_none()),
        ("arguments", std::env::args().next().is_none()),
        ("input", std::io::stdin().lines().next().is_none()),
    ];
    match seen.iter().find(|(_, denied)| !denied) {
        Some((what, _)) => Err(format!("reached {what}")),
        None => Ok(()),
    }
}

fn leak_batches() -> Result<(), String> {
    let trunk = open_trunk()?;
    let train = data::Dataset::open("train", &trunk, None).map_err(|error| format!("{error:?}"))?;
    let mut held = Vec::new();
    loop {
        match train.batch(&[0]) {
            Ok(batch) => held.push(batch),
            Err(error) => return Err(format!("after {}: {error:?}", held.len())),
        }
    }
}

fn text(bytes: usize) -> Result<(), String> {
    let trunk = open_trunk()?;
    let tokens = trunk.encode(&"t".repeat(bytes)).map_err(|error| format!("{error:?}"))?;
    job::metric("tokens", 0, tokens.len() as f64);
    Ok(())
}

fn calls(count: u64) -> Result<(), String> {
    for _ in 0..count {
        black_box(job::seed());
    }
    Ok(())
}

fn open_trunk() -> Result<trunk::Trunk, String> {
    trunk::Trunk::open("model").map_err(|error| format!("{error:?}"))
}
