//! A tenant that has all seats gives one up to whoever waits, high priority or not, and loses nothing by it.

use nodus_tests::assert_same;

use crate::server::{JOB, Scene, Server, kept};

#[test]
fn who_has_all_seats_gives_one_up_after_a_while_and_goes_on_to_the_same_bytes() {
    let scene = Scene::new();
    let long = [&JOB[2..], &["--set", "steps=2000"]].concat();
    scene.run("alone", &long);
    let other = scene.tenant("other");
    let server = Server::start_with(&scene, &["--device", "cpu", "--device-jobs", "2", "--patience", "1", "--snapshot-every", "0.3"]);
    let high = [&long[..], &["--high"]].concat();
    let [first, second, third] = [(); 3].map(|()| server.submit(&high).remove(0));
    [&first, &second].iter().for_each(|id| server.steps(id, 1));
    server.speak_for(&other);
    let low = &server.submit(&["--set", "steps=20"])[0];
    assert_eq!(server.ended(low)["state"], "succeeded");
    server.speak_for(&scene.token);
    for id in [&first, &second, &third] {
        assert_eq!(server.ended(id)["state"], "succeeded");
        assert_same(&kept(&scene.host.path("alone")), &kept(&server.fetch(id, id)), id);
    }
    let attempts = [&first, &second, &third].map(|id| server.job(id)["attempts"].as_u64().unwrap());
    assert!(attempts[..2].iter().any(|attempts| *attempts >= 2), "neither made room and went on: {attempts:?}");
    assert!(scene.log().contains("a job went on where it was cut off"), "{}", scene.log());
}
