//! 33: bodies that unpack to more than they are, that lie about their length, that never end.

use std::io::Write as _;
use std::net::TcpStream;

use nodus_tests::{Server, answer, text};

use super::{NEIGHBOUR, Scene, code};

/// A gzip file of zeros beyond measure, by its beginning.
const BOMB: &[u8] = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xec\xc1\x01\x01\0\0\0\x80\x90\xfe\xaf\xee\x08\x0a";

/// Begins a request whose body is said to have so many bytes.
fn begun(server: &Server, token: &str, (method, path): (&str, &str), head: &str) -> TcpStream {
    let mut stream = server.connect();
    let begin = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {token}\r\n{head}\r\n");
    stream.write_all(begin.as_bytes()).unwrap();
    stream
}

#[test]
fn n33_bodies_that_are_not_what_they_say_are_refused_and_leave_nothing() {
    let scene = Scene::new(&["stored-bytes=64MiB"]);
    let alone = scene.alone("alone", &NEIGHBOUR);
    let server = scene.serve(&[]);
    let component = ("POST", "/v1/components");
    let data = ("PUT", "/v1/data/bad");

    // Packed bodies are not unpacked: said to be packed, they are refused, else they are what they are.
    for (place, plain) in [(component, "component-refused"), (data, "data-refused")] {
        for coding in ["gzip", "zstd", "br", "gzip, gzip"] {
            let (status, _, body) = server.request(Some(&scene.a), place.0, place.1, &[("content-encoding", coding)], BOMB);
            assert_eq!((status, code(&body).as_str()), (415, "wrong-media-type"), "{coding}");
        }
        let (status, _, body) = server.request(Some(&scene.a), place.0, place.1, &[], BOMB);
        assert_eq!((status, code(&body).as_str()), (422, plain), "{}", text(&body));
    }
    // Less than was said, more than was said, nothing, and chunks that are none.
    for (place, head, sent) in [
        (component, "content-length: 1000\r\n", &b"\0asm\x0d\0\x01\0"[..]),
        (data, "content-length: 1000\r\n", b"{\"text\": \"x\"}\n"),
        (data, "transfer-encoding: chunked\r\n", b"e\r\n{\"text\": \"x\"}\n\r\nzz\r\n"),
        (data, "transfer-encoding: chunked\r\n", b"ffffffffffffffffff\r\n{\"text\": \"x\"}\n"),
        (data, "content-length: 0\r\n", b""),
        (data, "content-length: -1\r\n", b"{\"text\": \"x\"}\n"),
        (data, "content-length: 3\r\ncontent-length: 14\r\n", b"{\"text\": \"x\"}\n"),
        (data, "content-length: 14\r\ntransfer-encoding: gzip\r\n", b"{\"text\": \"x\"}\n"),
    ] {
        let mut stream = begun(&server, &scene.a, place, head);
        drop(stream.write_all(sent));
        drop(stream.shutdown(std::net::Shutdown::Write));
        // Who hangs up may be hung up on.
        let status = answer(stream).map(|(status, ..)| status);
        assert!(status.is_none_or(|status| (400..500).contains(&status)), "{head}: {status:?}");
    }
    // One that says little and sends more: what is beyond is no part of it.
    let mut stream = begun(&server, &scene.a, ("PUT", "/v1/data/short"), "content-length: 14\r\n");
    stream.write_all(b"{\"text\": \"x\"}\n{\"text\": \"y\"}\n").unwrap();
    assert_eq!(answer(stream).map(|(status, ..)| status), Some(201));
    // One that promises more than any may be is refused by its own word, and is not read for long.
    let mut stream = begun(&server, &scene.a, data, "content-length: 1000000000000\r\n");
    let line = format!("{{\"text\": \"{}\"}}\n", "x".repeat(1 << 20));
    let reader = stream.try_clone().unwrap();
    let answered = std::thread::spawn(move || answer(reader));
    let sent = (0..1000).take_while(|_| stream.write_all(line.as_bytes()).is_ok()).count();
    let (status, _, body) = answered.join().unwrap().unwrap();
    assert_eq!((status, code(&body).as_str()), (413, "too-large"));
    assert!(sent < 200, "{sent} MiB were taken");

    // Uploads that stand still: the attacker has so many and no more, and the neighbour's go through meanwhile. How long they may stand
    // still: `a_body_may_pause_and_be_slow_but_not_for_ever`.
    let mut still: Vec<TcpStream> = Vec::new();
    let refused = loop {
        let (status, head, body) = server.request(Some(&scene.a), component.0, component.1, &[], b"x");
        // While there is room for one more, it is looked at, and is no component.
        if status != 422 {
            break (head, code(&body));
        }
        let mut stream = begun(&server, &scene.a, component, "content-length: 1000\r\n");
        stream.write_all(b"\0asm").unwrap();
        still.push(stream);
        assert!(still.len() < 40, "as many uploads stand still as there are");
        std::thread::sleep(std::time::Duration::from_millis(100));
    };
    assert!(refused.1 == "rate-limited" && refused.0.contains("retry-after: 1"), "{refused:?}");
    scene.assert_as_alone(&server, &scene.b, &scene.sft(&server, &scene.b, &NEIGHBOUR)[0], &alone);
    drop(still);

    // Nothing is kept of any of it but the one line.
    assert_eq!(scene.usage(&server, &scene.a, "stored_bytes"), 14);
    let began = std::time::Instant::now();
    let left = || std::fs::read_dir(scene.host.path("data/service/tmp")).unwrap().count();
    while left() > 0 {
        assert!(began.elapsed() < std::time::Duration::from_secs(120), "{} temporary files are left", left());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    scene.assert_sound(&server);
}
