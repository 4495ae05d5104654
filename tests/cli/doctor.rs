// SPDX-License-Identifier: Apache-2.0
//! `weft doctor` without an agent, with an agent, and with an agent that gives no proper answer.

use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use serde_json::{Value, json};

use super::namespace::ip;
use super::*;

fn doctor(place: &Place, flags: &[&str]) -> (Option<i32>, String) {
    let (file, socket) = (place.text("subnet.env"), place.text("weft.sock"));
    let out = weft(&[&["doctor", "--subnet-file", &file, "--socket", &socket], flags].concat(), &[]);
    assert!(out.stderr.is_empty(), "{flags:?}: {}", String::from_utf8_lossy(&out.stderr));
    (out.status.code(), String::from_utf8(out.stdout).unwrap())
}

fn doctor_json(place: &Place, flags: &[&str]) -> (Option<i32>, Value) {
    let (code, text) = doctor(place, &[flags, &["-o", "json"]].concat());
    (code, serde_json::from_str(&text).unwrap())
}

#[test]
fn before_the_first_start_a_sound_node_has_no_findings_and_nothing_is_written() {
    in_namespace(|| {
        let place = Place::new();
        let (code, text) = doctor(&place, &[]);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.starts_with("0 findings\n"), "{text}");
        assert!(text.contains("not examined: what only a running agent knows: no agent answers on "), "{text}");
        let (code, answer) = doctor_json(&place, &[]);
        assert_eq!((code, &answer["findings"]), (Some(0), &json!([])));
        assert!(answer["not_examined"][0].as_str().unwrap().contains("no agent answers"), "{answer}");
        assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 0, "the command writes nothing");
    });
}

#[test]
fn a_finding_has_evidence_and_remedy_and_the_exit_code_is_2() {
    in_namespace(|| {
        let place = Place::new();
        let other = UdpSocket::bind("0.0.0.0:8472").unwrap();
        // A worker of this program has the same socket. It is no second finding.
        let shared = OwnedFd::from(other.try_clone().unwrap());
        let mut worker = Command::new("sleep").arg("600").stdin(shared).spawn().unwrap();
        // A process that another test is just starting has a copy of the socket, too, until it executes its program.
        let answer = wait_for("one finding", || {
            let (code, answer) = doctor_json(&place, &["--only", "port"]);
            assert_eq!(code, Some(2), "{answer}");
            (answer["findings"].as_array().unwrap().len() == 1).then_some(answer)
        });
        let finding = &answer["findings"][0];
        assert_eq!(finding["check"], "port");
        let pid = format!("(pid {})", std::process::id());
        for part in ["evidence", "remedy"] {
            assert!(finding[part].as_str().unwrap().contains(&pid), "{answer}");
        }
        let text = wait_for("one finding as text", || {
            let (code, text) = doctor(&place, &[]);
            assert_eq!(code, Some(2), "{text}");
            (text.lines().nth(2) == Some("1 finding")).then_some(text)
        });
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], format!("port: {}", finding["evidence"].as_str().unwrap()));
        assert_eq!(lines[1], format!("    {}", finding["remedy"].as_str().unwrap()));
        assert_eq!(doctor(&place, &["--port", "8473"]).0, Some(0), "the socket is on another port");
        assert_eq!(doctor(&place, &["--only", "mtu,subnet-file"]).0, Some(0), "the check is not chosen");
        worker.kill().unwrap();
        worker.wait().unwrap();
    });
}

#[test]
fn the_store_is_examined_before_the_first_start_only_if_asked() {
    in_namespace(|| {
        let place = Place::new();
        let store = format!("--store=dir:{}", place.text("leases"));
        assert_eq!(doctor(&place, &[&store]).0, Some(0), "the store is not asked");
        let checks = |flags: &[&str]| {
            let (_, answer) = doctor_json(&place, &[&["--check-store", &store], flags].concat());
            let findings = answer["findings"].as_array().unwrap().clone();
            findings.iter().map(|found| format!("{}: {}", found["check"], found["evidence"])).collect::<Vec<_>>()
        };
        let found = checks(&[]);
        assert!(found.len() == 1 && found[0].contains("is no directory"), "{found:?}");
        fs::create_dir_all(place.path("leases/subnets")).unwrap();
        let config = place.path("leases/config.json");
        let found = checks(&[]);
        assert!(found.len() == 1 && found[0].contains("answers, and has no net-conf"), "{found:?}");
        fs::write(&config, r#"{"Network":"10.5.0.0/30"}"#).unwrap();
        let found = checks(&[]);
        assert!(found.len() == 1 && found[0].contains("store") && found[0].contains("net-conf in dir "), "{found:?}");
        fs::write(&config, r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#).unwrap();
        assert_eq!(checks(&[]), [""; 0], "this kernel has vxlan");
        let env = |network: &str| {
            format!("FLANNEL_NETWORK={network}\nFLANNEL_SUBNET=10.5.7.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n")
        };
        fs::write(place.path("subnet.env"), env("10.5.0.0/17")).unwrap();
        let found = checks(&["--only", "store"]);
        assert!(
            found.len() == 1 && found[0].contains("10.5.0.0/16, and") && found[0].contains("another cluster"),
            "{found:?}"
        );
        fs::write(place.path("subnet.env"), env("10.5.0.0/16")).unwrap();
        assert_eq!(checks(&["--only", "store"]), [""; 0]);
        fs::remove_file(place.path("subnet.env")).unwrap();
        ip("link add docker0 up type bridge");
        ip("addr add 10.5.3.1/24 dev docker0");
        let found = checks(&[]);
        assert!(found.len() == 1 && found[0].contains("docker0 is connected to 10.5.3.0/24"), "{found:?}");
    });
}

#[test]
fn problems_of_a_running_agent_are_findings_until_they_end() {
    in_namespace(|| {
        let place = Place::new();
        let mut agent = place.agent(&[], &[]);
        place.wait_status("config.json does not exist");
        let (code, text) = doctor(&place, &[]);
        assert_eq!(code, Some(2), "{text}");
        assert!(
            text.starts_with("agent: the agent reports: ") && text.contains("config.json does not exist"),
            "{text}"
        );
        assert!(!text.contains("no agent answers"), "{text}");
        place.configure();
        place.wait_status(", ready, weft");
        assert_eq!(doctor_json(&place, &["--only", "agent"]), (Some(0), json!({"findings": [], "not_examined": []})));
        assert_eq!(agent.term().code(), Some(0));
    });
}

#[test]
fn an_agent_that_was_killed_or_lost_its_socket_is_a_finding() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        let net_conf = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;
        fs::write(place.path("store/config.json"), net_conf).unwrap();
        let agent_check = || doctor_json(&place, &["--only", "agent"]);
        assert_eq!(agent_check().0, Some(0), "before the first start");
        let mut agent = place.agent(&[], &[]);
        place.wait_status(", ready, weft");
        assert_eq!(agent_check().0, Some(0));
        let evidence = |answer: &Value| answer["findings"][0]["evidence"].as_str().unwrap_or_default().to_owned();
        let pid = format!("weft (pid {}) runs, and no agent answers on ", agent.0.id());
        // The agent makes its socket again within ten seconds, which may be before the doctor looks.
        wait_for("the finding", || {
            let _ = fs::remove_file(place.path("weft.sock"));
            let (code, answer) = agent_check();
            (code == Some(2) && evidence(&answer).starts_with(&pid)).then_some(())
        });
        agent.0.kill().unwrap();
        agent.0.wait().unwrap();
        let (code, answer) = agent_check();
        assert!(code == Some(2) && evidence(&answer).starts_with("no agent answers on "), "{answer}");
        assert!(evidence(&answer).contains("its device flannel.1"), "{answer}");
    });
}

#[test]
fn an_agent_whose_process_is_stopped_is_a_finding_with_the_command_that_continues_it() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        let mut agent = place.agent(&[], &[]);
        place.wait_status(", ready, weft");
        let pid = agent.0.id();
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGSTOP).unwrap();
        let (code, answer) = doctor_json(&place, &["--only", "agent"]);
        let finding = &answer["findings"][0];
        let evidence = finding["evidence"].as_str().unwrap_or_default();
        assert!(code == Some(2) && evidence.contains("its process is stopped"), "{answer}");
        let remedy = finding["remedy"].as_str().unwrap_or_default();
        assert!(remedy.starts_with(&format!("kill -CONT {pid};")), "{answer}");
        let done = Command::new("sh").args(["-ec", remedy.split(';').next().unwrap()]).status();
        assert!(done.unwrap().success());
        place.wait_status(", ready, weft");
        assert_eq!(doctor_json(&place, &["--only", "agent"]).0, Some(0));
        assert_eq!(agent.term().code(), Some(0));
    });
}

#[test]
fn flanneld_beside_the_agent_is_found_and_weft_under_its_name_is_not() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        fs::create_dir(place.path("weft")).unwrap();
        let name = place.path("weft/flanneld");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_weft"), &name).unwrap();
        let (usual, state) = (place.command(), place.text("own-state"));
        let mut command = Command::new(&name);
        // Under this name, weft is the agent without the word `agent`.
        command.args(usual.get_args().skip(1)).args(["--state-dir", &state]).env_clear().stdout(Stdio::null());
        let mut agent = Agent(command.stderr(Stdio::null()).spawn().unwrap());
        place.wait_status(", ready, weft");
        assert_eq!(fs::read_to_string(format!("/proc/{}/comm", agent.0.id())).unwrap(), "flanneld\n");
        assert_eq!(doctor(&place, &["--only", "other-agent"]).0, Some(0));
        let program = place.path("flanneld");
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut other = Command::new(&program).arg("600").spawn().unwrap();
        let comm = format!("/proc/{}/comm", other.id());
        while fs::read_to_string(&comm).unwrap() != "flanneld\n" {
            std::thread::yield_now();
        }
        let (code, answer) = doctor_json(&place, &["--only", "other-agent"]);
        let evidence = answer["findings"][0]["evidence"].as_str().unwrap_or_default();
        assert_eq!(code, Some(2), "{answer}");
        assert!(evidence.contains(&format!("flanneld (pid {}) runs beside", other.id())), "{answer}");
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(doctor(&place, &["--only", "other-agent"]).0, Some(0));
        assert_eq!(agent.term().code(), Some(0));
    });
}

#[test]
fn a_name_that_does_not_resolve_and_a_key_that_is_missing_are_named() {
    in_namespace(|| {
        let place = Place::new();
        let key = place.text("client.key");
        for (flags, words) in [
            (vec!["--etcd-endpoints=http://etcd.invalid:2379".to_owned()], "etcd.invalid"),
            (
                vec![
                    "--etcd-endpoints=https://127.0.0.1:2379".to_owned(),
                    format!("--etcd-certfile={key}"),
                    format!("--etcd-keyfile={key}"),
                ],
                key.as_str(),
            ),
        ] {
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            let (code, answer) = doctor_json(&place, &[&["--check-store", "--only", "store"], &*flags].concat());
            let evidence = answer["findings"][0]["evidence"].as_str().unwrap_or_default();
            assert_eq!(code, Some(2), "{answer}");
            assert!(evidence.contains(words), "{words}: {answer}");
        }
    });
}

#[test]
fn an_agent_that_gives_no_proper_answer_is_a_finding_and_the_node_is_examined() {
    in_namespace(|| {
        let place = Place::new();
        let _other = UdpSocket::bind("0.0.0.0:8472").unwrap();
        let listener = UnixListener::bind(place.path("weft.sock")).unwrap();
        let examined = || {
            std::thread::scope(|scope| {
                // The first question is whether an agent answers, the second one is for its status.
                let answers = scope.spawn(|| {
                    for _ in 0..2 {
                        let (mut stream, _) = listener.accept().unwrap();
                        BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                        stream.write_all(b"nonsense\n").unwrap();
                    }
                });
                let (code, answer) = doctor_json(&place, &["--only", "agent,port"]);
                answers.join().unwrap();
                assert_eq!(code, Some(2));
                answer
            })
        };
        // A process that another test is just starting has a copy of the UDP socket, too, until it executes its program.
        let evidence = wait_for("both findings and no more", || {
            let answer = examined();
            let findings = answer["findings"].as_array().unwrap();
            let checks: Vec<&Value> = findings.iter().map(|finding| &finding["check"]).collect();
            (checks == ["agent", "port"]).then(|| findings[0]["evidence"].as_str().unwrap().to_owned())
        });
        assert!(evidence.starts_with("the agent does not show its status: read the answer on "), "{evidence}");
    });
}

#[test]
fn every_check_is_listed_and_documented_and_can_be_chosen() {
    let out = weft(&["doctor", "list"], &[]);
    assert_eq!(out.status.code(), Some(0));
    let text = String::from_utf8(out.stdout).unwrap();
    let names: Vec<&str> = text.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert!(names.contains(&"br-netfilter") && names.len() > 8, "{text}");
    let page = fs::read_to_string("docs/operations.md").unwrap();
    for name in &names {
        assert!(page.contains(&format!("\n| `{name}` | ")), "docs/operations.md lacks a row for {name}");
    }
    in_namespace(|| assert_eq!(doctor(&Place::new(), &["--only", &names.join(",")]).0, Some(0)));
    refused(&["doctor", "--only", "weather"], &[], 2, "weather");
    refused(&["doctor", "list", "--only", "port"], &[], 2, "--only");
    refused(&["doctor", "--only", "port", "list"], &[], 2, "list");
}
