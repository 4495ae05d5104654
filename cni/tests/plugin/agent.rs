// SPDX-License-Identifier: Apache-2.0
//! ADD waits for an agent that is not ready. STATUS fails only where every ADD would fail.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket};
use serde_json::json;

use crate::site::{Site, env_text, on_a_node, run};

const SUCCEEDING_PLUGIN: &str = r#"
cat >/dev/null
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion":"1.0.0"}'
[ "$CNI_COMMAND" != VERSION ] || echo '{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}'
"#;

/// Serves the agent's socket. The answer is "ready" while `ready` is true.
fn agent(site: &Site, ready: Arc<AtomicBool>) {
    let listener = UnixListener::bind(site.path("run/weft.sock")).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut line = String::new();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line, "{\"ready\":{}}\n");
            let problems = if ready.load(Ordering::SeqCst) { json!([]) } else { json!(["no lease yet"]) };
            let answer = json!({"ready": {"ready": problems == json!([]), "problems": problems}});
            // The plugin may have closed the connection.
            let _ = stream.write_all(format!("{answer}\n").as_bytes());
        }
    });
}

#[test]
fn add_waits_for_a_complete_subnet_env_and_logs_it() {
    on_a_node(|site| {
        site.script("fine", SUCCEEDING_PLUGIN);
        site.pod("p1");
        fs::remove_dir_all(site.path("run")).unwrap();
        let conf = site.conf(json!({"delegate": {"type": "fine"}}));
        let mut child = site.command("ADD", "p1", "eth0").stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        log.read_line(&mut line).unwrap();
        assert!(line.starts_with("waiting up to 10000 ms:") && line.contains("run/subnet.env"), "{line}");
        assert_eq!(child.try_wait().unwrap(), None);
        // An agent that does not replace the file atomically would leave an incomplete file first.
        fs::create_dir(site.path("run")).unwrap();
        fs::write(site.path("run/subnet.env"), "FLANNEL_NETWORK=10.5.0.0/16\n").unwrap();
        site.subnet_env(&env_text("10.5.1", "fd05:0:0:1", 1450));
        assert!(child.wait().unwrap().success());
        line.clear();
        log.read_line(&mut line).unwrap();
        // It says this only when it has seen the file, not when the time is over.
        assert!(line.starts_with("the agent is ready after"), "{line}");
    });
}

#[test]
fn add_fails_after_wait_seconds_and_names_the_missing_keys() {
    on_a_node(|site| {
        site.script("fine", SUCCEEDING_PLUGIN);
        site.pod("p1");
        site.subnet_env("FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\n");
        let conf = site.conf(json!({"delegate": {"type": "fine"}, "waitSeconds": 0.2}));
        let (code, text) = site.call("ADD", "p1", &conf).error();
        assert_eq!(code, 11, "the runtime may try again");
        assert!(text.contains("is missing FLANNEL_MTU, FLANNEL_IPMASQ. Check the log"), "{text}");
        assert_eq!(site.files("records"), Vec::<String>::new());
        site.call("DEL", "p1", &conf).success();
    });
}

#[test]
fn add_asks_the_agent_if_it_has_a_socket() {
    on_a_node(|site| {
        site.script("fine", SUCCEEDING_PLUGIN);
        site.pod("p1");
        let conf = site.conf(json!({"delegate": {"type": "fine"}, "waitSeconds": 0.3}));
        let status = site.conf(json!({"cniVersion": "1.1.0", "delegate": {"type": "fine"}}));
        // A killed agent leaves a socket on which nobody answers.
        drop(UnixListener::bind(site.path("run/weft.sock")).unwrap());
        site.call("ADD", "p1", &conf).success();
        site.call("STATUS", "", &status).success();
        fs::remove_file(site.path("run/weft.sock")).unwrap();
        let ready = Arc::new(AtomicBool::new(false));
        agent(&site, ready.clone());
        // ADD goes on in this state, so it must not make the node NotReady in Kubernetes, which would evict all pods.
        site.call("STATUS", "", &status).success();
        let begin = Instant::now();
        let answer = site.call("ADD", "p1", &conf).success();
        assert!(begin.elapsed() >= Duration::from_millis(300), "ADD must wait for an agent that is not ready");
        assert!(answer.stderr.contains("the agent is not ready (no lease yet): continuing with"), "{}", answer.stderr);
        ready.store(true, Ordering::SeqCst);
        site.call("STATUS", "", &status).success();
        let answer = site.call("ADD", "p1", &conf).success();
        assert!(!answer.stderr.contains("waiting"), "{}", answer.stderr);
        fs::remove_file(site.path("run/subnet.env")).unwrap();
        let (code, text) = site.call("STATUS", "", &status).error();
        assert!(code == 50 && text.contains("the node has no subnet yet"), "{code} {text}");
    });
}

/// An agent of another version may not know the question, and another program may have the socket.
#[test]
fn an_answer_that_does_not_say_whether_the_agent_is_ready_keeps_no_pod_waiting() {
    on_a_node(|site| {
        site.script("fine", SUCCEEDING_PLUGIN);
        site.pod("p1");
        let (socket, conf) = (site.path("run/weft.sock"), site.conf(json!({"delegate": {"type": "fine"}})));
        for (answer, noted) in [
            ("{\"error\":\"unknown request\"}\n", "says: unknown request"),
            ("hello\n", "ask the agent on"),
            ("", "ask the agent on"),
        ] {
            let _ = fs::remove_file(&socket);
            let listener = UnixListener::bind(&socket).unwrap();
            let answers = std::thread::spawn(move || {
                let mut stream = listener.accept().unwrap().0;
                let _ = BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new());
                let _ = stream.write_all(answer.as_bytes());
            });
            let log = site.call("ADD", "p1", &conf).success().stderr;
            assert!(log.contains(noted) && !log.contains("waiting"), "{answer:?}: {log}");
            answers.join().unwrap();
        }
    });
}

/// A store that is down for hours keeps the agent from becoming ready. Pods are added anyway, long before the time is over that
/// a missing subnet.env is waited for.
#[test]
fn add_continues_after_three_seconds_with_an_agent_that_is_not_ready() {
    on_a_node(|site| {
        site.script("fine", SUCCEEDING_PLUGIN);
        site.pod("p1");
        agent(&site, Arc::new(AtomicBool::new(false)));
        let begin = Instant::now();
        let answer = site.call("ADD", "p1", &site.conf(json!({"delegate": {"type": "fine"}}))).success();
        assert!(begin.elapsed() >= Duration::from_secs(3), "ADD must wait for an agent that is not ready");
        let log = answer.stderr;
        assert!(log.contains("waiting up to 3000 ms") && log.contains("(no lease yet): continuing with"), "{log}");
    });
}

#[test]
fn status_reports_missing_plugins_but_no_exhausted_addresses() {
    on_a_node(|site| {
        site.script("fine", SUCCEEDING_PLUGIN);
        let status = |delegate: &str| site.conf(json!({"cniVersion": "1.1.0", "delegate": {"type": delegate}}));
        let (code, text) = site.call("STATUS", "", &status("nosuch")).error();
        assert!(code == 50 && text.contains("nosuch"), "{code} {text}");
        let sick = r#"
            cat >/dev/null
            case $CNI_COMMAND in
            VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}' ;;
            STATUS) echo '{"code":50,"msg":"the delegate is sick"}'; exit 1 ;;
            esac"#;
        site.script("sick", sick);
        assert_eq!(site.call("STATUS", "", &status("sick")).error(), (50, "the delegate is sick ".to_owned()));
        // A delegate of an older version may fail with a verb that it does not know, and adds pods all the same.
        let old = r#"
            cat >/dev/null
            case $CNI_COMMAND in
            VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}' ;;
            STATUS) echo '{"code":4,"msg":"unknown CNI_COMMAND"}'; exit 1 ;;
            esac"#;
        site.script("old", old);
        site.call("STATUS", "", &status("old")).success();
        site.call("STATUS", "", &status("fine")).success();
        fs::create_dir_all(site.path("networks/cbr0")).unwrap();
        site.subnet_env(&env_text("10.5.1", "fd05:0:0:1", 1450).replace("/24", "/29"));
        for host in 2..=6 {
            site.call("STATUS", "", &status("fine")).success();
            fs::write(site.path(&format!("networks/cbr0/10.5.1.{host}")), "x\r\neth0").unwrap();
        }
        // The node is full, and its pods work. The runtime must not call it NotReady, because Kubernetes would evict all its pods.
        site.call("STATUS", "", &status("fine")).success();
        // A configuration of an old version is refused at once.
        assert_eq!(run(site.command("STATUS", "", ""), &json!({"name": "x", "cniVersion": "1.0.0"})).error().0, 1);
    });
}

#[test]
fn the_time_between_questions_to_an_agent_that_is_not_ready_grows() {
    on_a_node(|site| {
        site.script("fine", SUCCEEDING_PLUGIN);
        site.pod("p1");
        let asked = Arc::new(AtomicUsize::new(0));
        let listener = UnixListener::bind(site.path("run/weft.sock")).unwrap();
        let count = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                count.fetch_add(1, Ordering::SeqCst);
                let _ = BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new());
                let _ = stream.write_all(b"{\"ready\":{\"ready\":false,\"problems\":[\"no lease yet\"]}}\n");
            }
        });
        let conf = site.conf(json!({"delegate": {"type": "fine"}, "waitSeconds": 2}));
        site.call("ADD", "p1", &conf).success();
        // At 0, 20, 60, 140, 300, 620, 1120, 1620 and 2000 ms, later on a busy machine.
        let asked = asked.load(Ordering::SeqCst);
        assert!((2..=9).contains(&asked), "{asked} questions");
    });
}

#[test]
fn add_does_not_block_on_an_agent_that_is_stopped() {
    on_a_node(|site| {
        site.script("fine", SUCCEEDING_PLUGIN);
        let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
        let path = UnixAddr::new(&site.path("run/weft.sock")).unwrap();
        bind(listener.as_raw_fd(), &path).unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        // Nobody accepts connections, so the queue fills up.
        let connect_one = || {
            let client = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_NONBLOCK, None).unwrap();
            connect(client.as_raw_fd(), &path).map(|()| client)
        };
        let mut clients = Vec::new();
        let refused = loop {
            match connect_one() {
                Ok(client) => clients.push(client),
                Err(errno) => break errno,
            }
        };
        assert_eq!(refused, Errno::EAGAIN);
        site.pod("p1");
        let answer = site.call("ADD", "p1", &site.conf(json!({"delegate": {"type": "fine"}}))).success();
        assert!(answer.stderr.contains("takes no calls"), "{}", answer.stderr);
    });
}
