// SPDX-License-Identifier: Apache-2.0
//! The log of the agent, and what a command does when its answer cannot be written.

use super::*;

#[test]
fn the_log_has_the_level_of_the_flag_and_what_the_command_line_leads_to() {
    for (flags, is_debug) in [(&["-v", "1", "-vmodule=a=1"][..], true), (&["-vmodule=a=1"], false)] {
        in_namespace(|| {
            let place = Place::new();
            place.configure();
            let mut agent = place.agent(flags, &[]);
            place.wait_status(", ready, weft");
            assert_eq!(agent.term().code(), Some(0));
            let log = agent.log();
            assert!(log.contains("--vmodule has no effect in weft: use -v"), "{log}");
            assert_eq!(log.contains("DEBUG"), is_debug, "{flags:?}: {log}");
        });
    }
}

#[test]
fn the_status_is_text_or_json_and_whole_or_its_rules_alone() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        let mut agent = place.agent(&[], &[]);
        place.wait_status(", ready, weft");
        let socket = place.text("weft.sock");
        let status = |words: &[&str]| {
            let all: [&[&str]; 3] = [&["status"], words, &["--socket", &socket]];
            let out = weft(&all.concat(), &[]);
            assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
            String::from_utf8(out.stdout).unwrap()
        };
        let json = |words: &[&str]| serde_json::from_str::<serde_json::Value>(&status(words)).unwrap();
        assert!(status(&[]).starts_with("node        ") && status(&["rules"]).starts_with("rules       "));
        let (whole, rules) = (json(&["-o", "json"]), json(&["rules", "-o", "json"]));
        assert!(whole["ready"] == true && whole["rules"].is_object(), "{whole}");
        assert!(rules["in_place"].is_boolean() && rules["ready"].is_null(), "{rules}");
        assert_eq!(agent.term().code(), Some(0));
    });
}

/// Scripts trust the exit code. A reader such as `head` may close its end at any time.
#[test]
fn an_answer_that_cannot_be_written_is_a_failure_and_one_that_nobody_reads_is_not() {
    let version = |stdout: Stdio| {
        let out = Command::new(env!("CARGO_BIN_EXE_weft")).arg("version").env_clear().stdout(stdout).status();
        out.unwrap().code()
    };
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert_eq!(version(full.into()), Some(1));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(version(writer.into()), Some(0));
}

/// The first window in which repeats are only counted lasts ten seconds.
#[test]
fn what_is_logged_again_and_again_is_counted_and_told_while_the_agent_runs_and_at_its_end() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        let mut agent = place.agent(&[], &[]);
        let log = BufReader::new(agent.0.stderr.take().unwrap());
        let (send, lines) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            log.lines().map_while(Result::ok).for_each(|line| drop(send.send(line)));
        });
        place.wait_status(", ready, weft");
        let file = place.path("subnet.env");
        let write_again = || {
            fs::remove_file(&file).unwrap();
            wait_for("subnet.env", || file.exists().then_some(()));
        };
        let is_told = |line: &str| line.contains("subnet.env written") && line.contains(" more time");
        write_again();
        write_again();
        while !is_told(&lines.recv_timeout(LIMIT).expect("the agent tells how often it wrote the file")) {}
        write_again();
        assert_eq!(agent.term().code(), Some(0));
        let rest: Vec<String> = lines.iter().collect();
        assert!(rest.iter().any(|line| is_told(line)), "{rest:#?}");
        reader.join().unwrap();
    });
}
