// SPDX-License-Identifier: Apache-2.0
//! The sections of a manual page that do not follow from the flags alone: ENVIRONMENT, EXIT STATUS, FILES and SEE ALSO.

use std::path::Path;

use clap::{Arg, Command};
use clap_mangen::roff::{Roff, bold, roman};
use weft::cli::{ENVIRONMENT, reads_environment};
use weft_subnet::env::{USUAL_FILE, socket};

/// Flags whose default is a file or a directory, and what is there.
const PLACES: [(&str, &str); 4] = [
    ("subnet-file", "The file that tells container runtimes the subnet and the MTU."),
    ("state-dir", "The directory of the saved peers and of the history."),
    ("cni-conf-dir", "The directory in which the container runtime looks for CNI configurations."),
    ("net-config-path", "The configuration of the network in Kubernetes."),
];

/// What exit code 2 also means, by command.
const FOUND: [(&str, &str); 4] = [
    ("weft plan", "There is something to write"),
    ("weft mesh", "A way is broken"),
    ("weft doctor", "Something was found"),
    ("weft explain", "Packets are lost on this node"),
];

/// Returns these sections of the page of a command. `call` is how it is called, such as `weft lease ls`.
pub fn of(command: &Command, call: &str) -> String {
    let mut page = Roff::new();
    environment(&mut page, command, call);
    exit_status(&mut page, call);
    files(&mut page, command, call);
    see_also(&mut page, command, call);
    page.to_roff()
}

/// Appends a term and what it means.
fn entry(page: &mut Roff, term: &str, meaning: &str) {
    page.control("TP", []).text([bold(term)]).text([roman(meaning)]);
}

fn environment(page: &mut Roff, command: &Command, call: &str) {
    let flags = || command.get_arguments().filter(|arg| arg.get_long().is_some());
    let takes_value = |arg: &Arg| arg.get_action().takes_values();
    if !reads_environment(call) || !flags().any(takes_value) {
        return;
    }
    page.control("SH", ["ENVIRONMENT"]).text([roman(ENVIRONMENT)]);
    if !flags().all(takes_value) {
        page.text([roman("A flag without a value must be on the command line.")]);
    }
}

fn exit_status(page: &mut Roff, call: &str) {
    page.control("SH", ["EXIT STATUS"]);
    entry(page, "0", "The command succeeded.");
    let failure = match call {
        "weft agent" => "The agent could not start; or it lost its lease, with --on-lost-lease=exit.",
        "weft doctor pods" => "The command failed, or something certainly leaks.",
        _ => "The command failed.",
    };
    entry(page, "1", failure);
    let usage = match FOUND.iter().find(|(command, _)| *command == call) {
        Some((_, found)) => format!("{found}; or the command line is wrong."),
        None => "The command line is wrong.".to_owned(),
    };
    entry(page, "2", &usage);
}

/// The page of weft has the files of the agent.
fn files(page: &mut Roff, command: &Command, call: &str) {
    let command = command.find_subcommand("agent").unwrap_or(command);
    let arg = |name: &str| command.get_arguments().find(|arg| arg.get_long() == Some(name));
    let mut found = Vec::new();
    for (flag, meaning) in PLACES {
        if let Some([place]) = arg(flag).map(Arg::get_default_values) {
            found.push((place.to_string_lossy().into_owned(), format!("{meaning} --{flag} names another one.")));
        }
    }
    if arg("socket").is_some() {
        let place = socket(Path::new(USUAL_FILE)).display().to_string();
        let meaning = "The socket on which the agent answers. It follows from --subnet-file, or --socket names it.";
        found.push((place, meaning.to_owned()));
    }
    if matches!(call, "weft" | "weft agent") {
        let meaning = "The variables of the agent, where systemd starts it.";
        found.push(("/etc/default/weft".to_owned(), meaning.to_owned()));
    }
    if !found.is_empty() {
        page.control("SH", ["FILES"]);
    }
    for (place, meaning) in found {
        entry(page, &place, &meaning);
    }
}

/// Names the page above, and those below.
fn see_also(page: &mut Roff, command: &Command, call: &str) {
    let above = call.rsplit_once(' ').map(|(above, _)| above.to_owned());
    let agent = ["weft status", "weft doctor"].iter().filter(|_| call == "weft agent").map(|name| (*name).to_owned());
    let below = command.get_subcommands().map(|below| format!("{call} {}", below.get_name()));
    let pages: Vec<String> = above.into_iter().chain(agent).chain(below).map(|call| call.replace(' ', "-")).collect();
    page.control("SH", ["SEE ALSO"]);
    let mut text = Vec::new();
    for (at, name) in pages.iter().enumerate() {
        let end = if at + 1 < pages.len() { ", " } else { "" };
        text.extend([bold(name.as_str()), roman(format!("({}){end}", super::SECTION))]);
    }
    page.text(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the sections of a command as text without marks.
    fn page(call: &str) -> String {
        let weft = weft::cli::command();
        let words = call.split(' ').skip(1);
        let command = words.fold(&weft, |command, word| command.find_subcommand(word).expect("a command"));
        of(command, call).replace('\\', "")
    }

    #[test]
    fn the_page_of_the_agent_names_variables_files_and_other_pages() {
        let agent = page("weft agent");
        for wanted in [
            "FLANNELD_SUBNET_FILE",
            "/run/flannel/subnet.env",
            "/run/flannel/weft.sock",
            "/var/lib/weft",
            "/etc/default/weft",
            "it lost its lease, with --on-lost-lease=exit",
            "weft-status",
        ] {
            assert!(agent.contains(wanted), "{wanted} is missing in\n{agent}");
        }
        assert!(page("weft").contains("/run/flannel/subnet.env"), "the files of the agent");
    }

    #[test]
    fn a_page_promises_only_variables_that_are_read() {
        for call in
            ["weft doctor", "weft doctor pods", "weft lab", "weft docker-opts", "weft install-conf", "weft version"]
        {
            assert!(!page(call).contains("FLANNELD_"), "{call}");
        }
        assert!(page("weft history").contains("FLANNELD_") && page("weft history").contains("without a value"));
        assert!(page("weft lease ls").contains("FLANNELD_"));
    }

    #[test]
    fn exit_code_2_says_what_was_found() {
        assert!(page("weft mesh").contains("A way is broken; or the command line is wrong."));
        assert!(page("weft status").contains("The command line is wrong."));
    }
}
