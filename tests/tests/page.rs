//! The live page in a browser, by its keyboard: signed in, jobs and why they wait, a sweep's curves, receipts checked, results fetched.
//!
//! The page asks nobody but its service and has nothing to complain of.

use nodus_tests::browser::{Browser, keys};
use nodus_tests::{Host, Server, guest};
use serde_json::Value;

/// Goes on by the keyboard until what has it is called so.
fn go_to(browser: &Browser, name: &str) {
    for _ in 0..60 {
        if browser.run("return document.activeElement.textContent || document.activeElement.id") == name {
            return;
        }
        browser.press(keys::TAB);
    }
    panic!("the keyboard does not reach `{name}`");
}

#[test]
fn the_page_shows_a_sweep_as_it_trains_and_obeys_the_keyboard() {
    let Some(browser) = Browser::start() else {
        eprintln!("skipped: this machine has no chromium and chromedriver (Debian: chromium, chromium-driver)");
        return;
    };
    let host = Host::with_llama();
    let (token, data) = (host.tenant("acme", &["running-jobs=2"]), host.path("tokens.jsonl"));
    let sft = format!("sft={}", guest("sft").display());
    let server = Server::start(&host, &["--device", "cpu", "--component", &sft]);
    let fixed = ["sft", "--model", "llama", "--data", data.to_str().unwrap(), "--held-out-count", "6"];
    let sweep = server.submit(&token, &[&fixed[..], &["--set", "steps=100000", "--sweep", "learning_rate=0.01,0.003"]].concat());
    let waiting = server.submit(&token, &[&fixed[..], &["--set", "epochs=1"]].concat()).remove(0);
    sweep.iter().for_each(|id| server.steps(&token, id, 3));

    browser.open(&server.url);
    go_to(&browser, "token");
    browser.press(&token);
    browser.press(keys::ENTER);
    browser.wait("return document.getElementById('who').textContent", |who| who == "acme");
    let rows = "return [...document.querySelectorAll('#rows tr')].map(row => row.innerText)";
    let rows = browser.wait(rows, |rows| rows.as_array().unwrap().len() == 2 && rows[0].as_str().unwrap().contains("waiting for another"));
    assert!(rows[0].as_str().unwrap().contains(&waiting) && rows[1].as_str().unwrap().contains("2 running"), "{rows}");
    let lanes = "return [...document.querySelectorAll('#lanes rect title')].map(title => title.textContent)";
    browser.wait(lanes, |lanes| lanes.as_array().unwrap().iter().filter(|lane| lane.as_str().unwrap().contains("fused")).count() == 2);

    go_to(&browser, "Sweep of 2 over learning_rate");
    browser.press(keys::ENTER);
    browser.wait("return document.activeElement.id", |id| id == "one-title");
    let points = "return [...document.querySelectorAll('#chart polyline')].map(line => line.getAttribute('points').split(' ').length)";
    let many = |points: &Value| points.as_array().unwrap().iter().filter(|count| count.as_u64().unwrap() > 5).count() == 2;
    browser.wait(points, many);
    let legend = browser.run("return [...document.querySelectorAll('#legend li')].map(item => item.textContent)");
    assert_eq!(legend, serde_json::json!(["learning_rate=0.01", "learning_rate=0.003"]));
    assert!(browser.run("return document.getElementById('chart-title').textContent").as_str().unwrap().ends_with("2 jobs"));

    // They end well, and their receipts are checked in the page itself.
    server.ok(&token, &[&["cancel"][..], &sweep.iter().map(String::as_str).collect::<Vec<_>>()].concat());
    browser.wait("return document.getElementById('said').textContent", |said| said == "All of them ended.");
    go_to(&browser, "verify");
    browser.press(keys::ENTER);
    let said = browser.wait("return document.getElementById('said').textContent", |said| said.as_str().unwrap().contains("signature"));
    assert!(said.as_str().unwrap().contains("6 of 6 files are those that were signed"), "{said}");
    // Where whoever pressed the button looks, however far down the page that was.
    let seen = "const at = document.getElementById('said').getBoundingClientRect(); return at.top >= 0 && at.bottom <= innerHeight";
    browser.wait(seen, |seen| *seen == true);
    go_to(&browser, "adapter");
    let name = "return window.saved = [], HTMLAnchorElement.prototype.click = function () { saved.push(this.download); }, 0";
    browser.run(name).as_u64().unwrap();
    browser.press(keys::ENTER);
    let saved = browser.wait("return saved", |saved| saved.as_array().unwrap().len() == 3);
    assert_eq!(saved, serde_json::json!(["README.md", "adapter_config.json", "adapter_model.safetensors"]));

    go_to(&browser, "Sign out");
    browser.press(keys::ENTER);
    assert_eq!(browser.run("return [sessionStorage.length, document.querySelectorAll('#rows tr').length]"), serde_json::json!([0, 0]));
    assert_eq!(browser.console(), Vec::<String>::new());
    // The browser's own first page, and what the page made itself.
    let is_own = |origin: &String| ["chrome", "data:", "blob:"].iter().any(|scheme| origin.starts_with(scheme));
    let asked: Vec<String> = browser.asked().into_iter().filter(|origin| !is_own(origin)).collect();
    assert_eq!(asked, std::slice::from_ref(&server.url));

    // Last, since a browser complains of every refusal.
    go_to(&browser, "token");
    browser.press("nodus_wrong");
    browser.press(keys::ENTER);
    browser.wait("return document.getElementById('said').textContent", |said| said.as_str().unwrap().contains("token"));
}
