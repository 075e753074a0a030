//! Completions of stores and devices, added to the scripts that clap makes.

use clap_complete::Shell;

/// A shell's completion script, which also completes stores and devices.
pub fn with_stores(shell: Shell, script: String) -> String {
    match shell {
        Shell::Bash => script + include_str!("stores.bash"),
        Shell::Fish => script + include_str!("stores.fish"),
        Shell::Zsh => {
            // clap's script begins with a line that names the command, and ends with a call of its
            // completion function. So the functions of `stores.zsh` go between them, behind the
            // first line.
            let script = script.replace(":URL:_default'", ":URL:_weir_stores'");
            let script = script.replace(":vram|host|URL:_default'", ":URL:_weir_stores'");
            match script.split_once('\n') {
                Some((first, rest)) => format!("{first}\n{}{rest}", include_str!("stores.zsh")),
                None => script,
            }
        }
        _ => script,
    }
}
